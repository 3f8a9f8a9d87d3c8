from nereid.server.model import TritonPythonModel  # noqa: F401  the server looks the class up here
