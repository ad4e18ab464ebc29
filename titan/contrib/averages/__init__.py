"""Moving average of the weights over the steps of a run ([average])."""
