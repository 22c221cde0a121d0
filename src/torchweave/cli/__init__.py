"""Words to calls: the only place that prints or exits."""
