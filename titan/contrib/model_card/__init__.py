"""Model card of an exported model."""
