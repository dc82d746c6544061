"""How fast the engines are: measured or derived once, read by every run."""
