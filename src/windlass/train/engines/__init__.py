"""Engines: how a model is divided, updated and stepped. Each is one module with a function `assemble`.

`assemble(model, recipe, step, world, plan, beat)` takes the model on the meta device and returns its parts, its
optimizer and its stepper; `beat(phase)` is to be called at each phase of a step, so that the watchdog can say how far
this rank came. `windlass.registry.ENGINES` finds engines by module name, and those of other packages by the entry
point group "windlass.engines"."""
