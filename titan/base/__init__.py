"""Parts that everything else may use. They import nothing of titan outside this folder."""
