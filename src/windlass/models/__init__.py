"""One file per family of network; pure modules that know no mesh and no rank."""
