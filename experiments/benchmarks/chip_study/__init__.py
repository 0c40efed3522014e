"""Measurements of one borrowed accelerator in a few minutes, for `chip_report --study`."""
