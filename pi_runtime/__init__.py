"""Run a sparse language model from one `artifact.pi`.

from pi_runtime import load
model = load("artifact.pi")
for piece in model.generate("Once upon a time"):
    print(piece, end="")
"""
