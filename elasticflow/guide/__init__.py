"""The guide: one page for each topic, plain Markdown, shown by `elasticflow guide` and by any code host."""
