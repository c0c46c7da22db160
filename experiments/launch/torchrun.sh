#!/bin/bash
# One call on every host, with equal arguments:
#   HOSTS=2 RANKS=4 HEAD=host0:29500 IFACE=eth0 bash torchrun.sh train.py --checkpoint /shared/c.pt
# A rank that dies is noticed by all others, the agents start all ranks anew, and the script resumes.
set -euo pipefail
: "${HOSTS:?number of hosts}" "${RANKS:?ranks per host}" "${HEAD:?host:port of the first host}"
# gloo and topo-ar listen there; several NICs for topo-ar: TOPO_AR_SOCKET_IFNAME=eth0,eth1
if [ -n "${IFACE:-}" ]; then export GLOO_SOCKET_IFNAME=$IFACE NCCL_SOCKET_IFNAME=$IFACE; fi
# Without it gloo of torch 2.13 meets the addresses of the dead after a restart.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "$HOSTS" --nproc-per-node "$RANKS" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${JOB:-topo-ar}" \
  --max-restarts "${RESTARTS:-3}" "$@"
