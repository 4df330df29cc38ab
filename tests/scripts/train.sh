# Somebody's job script. Its first argument is the Python to use.
exec "$1" -m torch.distributed.run --standalone --nproc-per-node 2 "${@:2}"
