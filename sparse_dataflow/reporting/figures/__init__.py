"""Figures as inline SVG for pages, and as PNG files for studies."""
