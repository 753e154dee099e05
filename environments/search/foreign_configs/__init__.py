"""Tables of other systems' configurations, a YAML file each, and what reads files by them."""
