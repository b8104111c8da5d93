"""The live pages of `windlass dash`: a small server on localhost that reads run folders and writes only their notes."""
