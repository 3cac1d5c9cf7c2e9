"""`leyden doctor`: what a run will need, tried before it starts and without a GPU.

checkup     the checks in their order, each with a time limit
findings    what a check says
run_file    tasks, templates
model       tokenizer, renderer, chat template
access      who may call what at a gateway
engines     inference engines that the run file names
rehearsal   one task through a gateway, a controller and its backend, with a model that says one sentence
address     where that gateway listens
cluster     a Kubernetes cluster: rights, images, the network of a pod
probing     the Job that shows the last two; probe: what runs in its pod, alone and without Leyden
"""
