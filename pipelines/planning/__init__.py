"""How much memory a training and its model will take, before any weights are loaded; see `pipelines.plan`."""
