"""Small private runs: of rows, and of the clients of a federation."""

ROWS = """
model = {name = "mlp", inputs = 64, hidden = [], outputs = 10}
data = {path = "digits", transform = ["scale"], validation = "tail:0.2"}
train = {steps = 1, batch_size = 16, eval_every = 100}
optimizer = {name = "sgd", lr = 0.5, momentum = 0.0}
log = {every = 1, progress_s = 0}
privacy = {unit = "sample", noise = "seeded:1e-8"}
"""
CLIENTS = """
model = {name = "mlp", inputs = 64, hidden = [16], outputs = 10}
data = {path = "digits", transform = ["scale"]}
train = {steps = 4, batch_size = 10, eval_every = 100}
optimizer = {name = "sgd", lr = 0.1}
log = {every = 1, progress_s = 0}
workers = {count = 20, each_round = "poisson:0.4"}
privacy = {unit = "client", clip = 0.5, noise = "seeded:0.1", delta = 1e-3}
"""
