"""All that a GPU can say about this project, by one command: `python -m benchmarks.gpu`.

parts     what is asked, in order of importance; each part is cases, each case a process with its own time limit
runner    runs what is not known yet, and writes what is known after every case
child     the process of a case
page      what is known, as Markdown
collect   brings along what the machine with the GPU may lack

right, fast, inside, cards, beside, swarm, method: the cases. Every one calls what the programs run.
"""
