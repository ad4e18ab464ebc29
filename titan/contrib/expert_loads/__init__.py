"""Load of experts: columns of the metrics, and the table experts.json."""
