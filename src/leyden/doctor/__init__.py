"""`leyden doctor`: what a run will need, tried before it starts and without a GPU.

checkup     the checks in their order, each with a time limit
findings    what a check says
run_file    tasks, templates
model       tokenizer, renderer, chat template
access      who may call what at a gateway
engines     inference engines that the run file names
rehearsal   one task through a gateway, a controller and its backend, with an engine that says one sentence
cluster     a Kubernetes cluster: rights, images, the network of a pod
probe       what runs in that pod, alone and without Leyden
"""
