"""A model that cannot start."""


class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("the weights of this model are missing")

    def execute(self, requests):
        return None
