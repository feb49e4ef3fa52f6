"""The cases of the layout proofs: what a case is, the settings of each feature, and the choice of cases for the normal run."""
