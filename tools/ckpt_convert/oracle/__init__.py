"""megatron-core's own model of every family: what a conversion is checked against."""
