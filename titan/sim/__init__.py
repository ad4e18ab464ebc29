"""TorchSim: predict what a run costs in time and memory, without a GPU. docs/simulator.md says how."""
