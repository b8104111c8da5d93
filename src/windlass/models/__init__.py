"""Models: specs and presets (no torch), and the modules built from them."""
