"""From a kernel's source, Spec and Params to a compiled, loaded and launched kernel."""
