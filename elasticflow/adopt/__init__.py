"""`elasticflow adopt`: a training script of somebody's, and the lines that bring it to `elasticflow.join`."""
