"""Muon for the matrices of the blocks (optimizer.name = "Muon")."""
