"""Configuration: YAML and overrides, the schema, named components, checks, and the batch plan."""
