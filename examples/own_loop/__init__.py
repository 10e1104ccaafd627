"""Loops of other libraries on `elasticflow.join`: Accelerate, Lightning Fabric and the Trainer of Transformers."""
