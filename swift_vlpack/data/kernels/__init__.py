"""How the samples of a row attend: what a layer asks for, the mask of each sample, and the kernels there are."""
