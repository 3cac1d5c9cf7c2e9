"""Attempts as Kubernetes Jobs: one Job for the harness, one for each try of the grader.

manifest   pure: a run file's template and an attempt -> Job and Secret
api        the few calls of the API server, with typed errors
watch      list and watch as one stream that survives everything
ledger     what is known of the run's Jobs and pods; objects reads the API's JSON
rate       how many Jobs a minute
verdict    pure: Job, pods, events -> pending, running, saving, ended
keeper     what runs beside the harness in its pod, alone and without Leyden
"""
