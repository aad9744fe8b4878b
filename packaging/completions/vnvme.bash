# The program completes its own command line, names of running disks among it.
source <(vnvme completion bash)
