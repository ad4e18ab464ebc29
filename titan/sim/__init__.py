"""TorchSim: what a run costs in time and memory, told without a GPU. docs/simulator.md says how."""
