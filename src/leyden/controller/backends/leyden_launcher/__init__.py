"""A program of its own, run by the harness's interpreter as `python leyden_launcher SPEC`; see `launcher`."""
