"""Model zoo, installed as `titan.models`: one folder for each family.

docs/architecture.md lists the contents of a folder.
"""
