# vnvme - each target is alone enough on a fresh Debian or Ubuntu machine with git, make and a Rust toolchain.
#
#   make demo         a disk served to a real Linux guest, end to end
#   make quick        formatting, lints and the unit tests that are fast: before each commit
#   make test         formatting, lints, all unit, property and socket tests, one guest for each front-end
#   make test-guests  all other guest tests, models, instruction counts, fuzz targets for ten seconds, documentation, AArch64
#   make test-long    hours, before a release: every test that is ignored elsewhere, hundreds of kills, fuzzing, the oldest Rust, advisories
#   make simulate     new seeds of the simulation (testing/simulation), up to SEEDS in SECONDS (60)
#   make mutants      DRAW (10) of the mutants in testing/harness/mutants.toml, drawn by SEED (the commit); a test must fail for each
#   make check        formatting, lints, documentation, AArch64, the minimal build, licences
#   make msrv         everything with the oldest Rust that Cargo.toml promises, where rustup has it
#   make deny         licences, sources and known vulnerabilities of all dependencies, by cargo-deny
#   make fuzz         the fuzz targets, FUZZ_SECONDS each (default 600)
#   make conformance  the cases of the public NVMe test plans, against vnvme (docs/conformance.md)
#   make cost         instructions for each I/O, held against testing/bench/ceilings.toml
#   make bench        the benchmarks
#   make packages     deb, rpm, tarball and container image for x86-64 and AArch64, in target/packages
#   make release      the packages, the sources, notes and checksums of the version, in target/packages
#   make test-packages the packages in Debian 12 and 13: installed, used by a guest, removed; the image under runc
#   make book         the documents as a book with search, in target/book, by mdBook (built once, into target/tools)
#   make docs         docs/reference.md, the man pages in docs/man, docs/metrics.md and docs/conformance.md, from their tables; docs/openapi.json
#   make help         these lines

CARGO ?= cargo
FUZZ_SECONDS ?= 600
SIMULATION_SECONDS ?= 3600
export CARGO

# Not written in a recipe: make would run such a line even where it is to print them only.
AGAIN = $(MAKE) --no-print-directory

.DEFAULT_GOAL := demo
.PHONY: demo quick test test-steps test-guests test-guests-steps test-long test-long-steps prebuild mutants simulate check minimal aarch64 msrv deny conformance cost cost-step fuzz bench docs install uninstall package packages release test-packages book help \
	tools-build tools-guest tools-bench tools-tests

# Both programs by one build: each by itself has other features of what they share, and has it built
# again.
demo: tools-guest
	$(CARGO) build --release -p vnvme -p harness --bin vnvme --bin demo
	VNVME_BIN=$(abspath $(RELEASE))/vnvme $(RELEASE)/demo

help:
	@sed -n 's/^#   make /  make /p' Makefile

# Tests of a tier are a step each, whose time and result the report at its end has (testing/tier). All steps use the features of
# the whole workspace, so that clippy, tests and programs are built once.
TARGET = $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
DEBUG = $(TARGET)/debug
TIER = $(DEBUG)/tier
STEP = $(TIER) step
TESTS = $(TIER) tests

# $(call tier,NAME): the steps of a tier, its skips and its report. In CI a skip that .ci/skips does not list is a failure.
tier = $(CARGO) build --quiet -p tier && VNVME_PROGRAMS=$(DEBUG) testing/harness/skips.sh $(TIER) run $(1) $(AGAIN) $(1)-steps

LINTS = $(CARGO) clippy --quiet --workspace --lib --bins --tests --examples $(APART:%=--test %) -- -D warnings
DOCUMENTATION = env RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --workspace --no-deps
STYLE = sh -c 'testing/harness/words.sh && $(CARGO) fmt --all --check'

# Test programs that only `make test-guests` runs (`test = false` in their Cargo.toml).
APART = guests loom suites
# Unit tests that take seconds.
SLOW = in_process_controller_keeps tests::loss:: tests::queues:: tests::random_instructions_end every_target_accepts_its_corpus \
	threads::tests::unanswered_request_times_out accounts::tests::single_command_guest
quick: tools-build
	testing/harness/setup.sh check
	$(STYLE)
	$(LINTS)
	$(CARGO) build --quiet -p tier
	$(TESTS) 'unit tests' --workspace --lib --bins -- $(SLOW:%=--skip %)

# An ordinary user's PATH lacks /usr/sbin, where Debian has cryptsetup.
test test-long: export PATH := $(PATH):/usr/sbin:$(CURDIR)/target/tools/bin
test: tools-guest tools-tests
	testing/harness/setup.sh check
	$(call tier,test)

# The guests' image comes from a mirror while the tests without a guest run.
test-steps:
	$(STEP) style $(STYLE)
	$(STEP) clippy $(LINTS)
	$(STEP) 'build of tests' $(CARGO) test --quiet --workspace --no-run
	$(STEP) 'build of guest tests' $(CARGO) test --quiet --workspace --no-run --test guests
	nice -n 19 $(STEP) 'guest image' $(DEBUG)/prepare & \
	status=0; $(TESTS) 'unit, property and socket tests' --workspace || status=$$?; wait $$! || status=$$?; exit $$status
	$(TESTS) 'a guest for each front-end' --repeat --workspace --test guests -- first::

test-guests: tools-guest tools-bench
	$(call tier,test-guests)

# Builds that use one processor for minutes run behind the guests, which leave one idle for much of their time.
test-guests-steps:
	$(STEP) 'build of tests' $(CARGO) test --quiet --workspace --no-run
	$(STEP) 'build of guest tests' $(CARGO) test --quiet --workspace --no-run $(APART:%=--test %)
	$(STEP) 'guest image' $(DEBUG)/prepare --all
	nice -n 19 $(AGAIN) prebuild >$(TARGET)/prebuild.log 2>&1 & \
	status=0; $(TESTS) guests --repeat --workspace --test guests -- --skip first:: || status=$$?; wait; exit $$status
	$(TESTS) 'models and suites' --workspace --test loom --test suites
	$(STEP) 'examples in documentation' $(CARGO) test --quiet --workspace --doc
	$(STEP) 'documentation' $(DOCUMENTATION)
	$(STEP) 'minimal build' $(AGAIN) minimal
	$(STEP) AArch64 $(AGAIN) aarch64
	$(STEP) 'instruction counts' $(AGAIN) cost-step
	$(STEP) 'fuzz targets, 10 s each' testing/fuzz/run.sh 10

# Builds that the last steps of `test-guests` want. A build that fails here fails again in the step that wants it. The last two
# lock target/debug: no guest test builds anything there.
prebuild: tools-bench
	-$(CARGO) build --release -p vnvme
	-$(CARGO) build --release -p bench --bin vnvme-export --bin vnvme-volume
	-testing/fuzz/run.sh build
	-$(AGAIN) aarch64
	-$(DOCUMENTATION)
	-$(AGAIN) minimal

# How long the tests of this tier go on: CONTRIBUTING.md has the variables.
LONG = NEXTEST_PROFILE=long VNVME_KILLS=200 VNVME_UPGRADES=50 VNVME_CUTS=200 VNVME_DEATHS=20 VNVME_LIVES=1000 VNVME_FENCES=10000 VNVME_PATH_SECONDS=600 \
	VNVME_HOST_LONG=1 VNVME_SOAK_SECONDS=600 VNVME_FENCING_LOOPS=10000 VNVME_CHAOS_KILLS=100 VNVME_STARTS=500 VNVME_STARVE_SECONDS=3,4,12,60 VNVME_STOP_MS=4000 VNVME_CRASH_BIN=$(DEBUG)/vnvme VNVME_NEEDS_S390X=1
# Guest tests that these variables lengthen.
LENGTHENED = survival:: power_cut:: qcow2:: nbd_image:: rbd_kills:: reservations:: nvme_tcp clients:: ap::
# Models that take far more steps in optimised code.
MODELS = $(CARGO) test --quiet --profile fast -p vnvme-driver --lib --test it -- iova:: mapper::
test-long: tools-guest tools-bench tools-tests
	$(call tier,test-long)

test-long-steps:
	$(STEP) 'build of tests' $(CARGO) test --quiet --workspace --no-run
	$(STEP) 'build of guest tests' $(CARGO) test --quiet --workspace --no-run $(APART:%=--test %)
	$(STEP) 'guest image' $(DEBUG)/prepare --all
	env $(LONG) $(TESTS) 'unit, property and socket tests' --workspace
	env $(LONG) $(TESTS) 'longer guests' --workspace --test guests -- $(LENGTHENED)
	env $(LONG) $(TESTS) 'deaths at every crash point' --workspace --test guests -- --ignored deaths::
	$(CARGO) build --quiet --release -p vnvme
	env NEXTEST_PROFILE=long VNVME_BIN=$(TARGET)/release/vnvme $(TESTS) 'figures of mapping' --workspace --test socket -- --ignored mapping::
	env NEXTEST_PROFILE=long VNVME_BIN=$(TARGET)/release/vnvme $(TESTS) 'figures of rbd' --workspace --test guests -- --ignored rbd_figures::
	$(STEP) 'models of millions of steps' $(MODELS)
	$(STEP) 'simulation of new seeds' $(SIMULATE) --seconds $(SIMULATION_SECONDS)
	$(STEP) fuzz testing/fuzz/run.sh $(FUZZ_SECONDS)
	$(STEP) libvirt testing/harness/libvirt.sh $(DEBUG)/vnvme
	$(STEP) 'published packages' $(CARGO) test --quiet -p testkit --test it -- --ignored published::
	$(STEP) 'oldest Rust' testing/harness/msrv.sh
	$(STEP) advisories testing/harness/deny.sh
	$(STEP) packages $(AGAIN) test-packages

# Prints the first seed, and the command that replays a seed that fails.
SECONDS ?= 60
SIMULATE = $(CARGO) run --quiet --profile fast -p simulation -- run
simulate: tools-build
	$(SIMULATE) $(SEEDS:%=--seeds %) $(FIRST:%=--first %) --seconds $(SECONDS)

SEED ?= $(shell git rev-parse HEAD)
DRAW ?= 10
mutants: tools-guest
	$(CARGO) build --quiet -p tier
	$(TIER) mutants --seed $(SEED) --draw $(DRAW)

check: tools-build
	testing/harness/setup.sh check
	$(STYLE)
	$(LINTS)
	$(DOCUMENTATION)
	$(AGAIN) minimal
	$(AGAIN) aarch64
	$(CARGO) test --quiet -p testkit --test it dependencies::

minimal:
	$(CARGO) clippy --quiet -p vnvme -p daemon -p config --no-default-features -- -D warnings
	$(CARGO) test --quiet -p daemon --no-default-features --lib parts::

aarch64:
	if testing/harness/setup.sh aarch64; then $(CARGO) check --quiet --workspace --target aarch64-unknown-linux-gnu; fi

# A skip is a failure with CI set: .ci/skips lists none of these two.
msrv: tools-build
	testing/harness/skips.sh testing/harness/msrv.sh

deny: tools-build
	testing/harness/skips.sh testing/harness/deny.sh

# What is counted is the program as it is released. Built by itself: together with other packages it could have other
# features of its dependencies, and so be another program.
RELEASE = $(or $(CARGO_TARGET_DIR),target)/release
COST = --suite cost --vnvme $(RELEASE)/vnvme --ceilings testing/bench/ceilings.toml --output target/cost
cost cost-step: export PATH := $(PATH):$(CURDIR)/target/tools/bin
cost: tools-build tools-bench
	$(CARGO) build --release -p vnvme
	$(CARGO) build --release -p bench --bin vnvme-export --bin vnvme-volume
	$(CARGO) run --quiet -p bench -- $(COST)

# With the load generator that the tests have built.
cost-step:
	$(CARGO) build --release -p vnvme
	$(CARGO) build --release -p bench --bin vnvme-export --bin vnvme-volume
	$(DEBUG)/vnvme-bench $(COST)

# As it is released; each program by itself, as `cost` says. Every wait in it is bounded; so is the whole.
conformance: tools-build
	$(CARGO) build --release -p vnvme
	$(CARGO) build -p conformance
	timeout 900 $(or $(CARGO_TARGET_DIR),target)/debug/conformance --vnvme $(abspath $(RELEASE))/vnvme

fuzz: tools-build
	testing/fuzz/run.sh $(FUZZ_SECONDS)

# Figures go to target/bench/results.json and report.html. What cannot be measured here is named, with the reason.
BENCH = target/bench
# Medians of the run before, by machine.
KEPT = target/bench-kept
bench: export PATH := $(PATH):$(CURDIR)/target/tools/bin
bench: tools-build tools-bench
	$(CARGO) build --release -p vnvme
	$(CARGO) build --release -p bench -p harness
	$(CARGO) build --release -p bench --bin vnvme-export --bin vnvme-volume
	rm -rf $(BENCH)
	mkdir -p $(BENCH)
	status=0; \
	$(CARGO) run --quiet --release -p bench -- --suite all --output $(BENCH) >/dev/null || status=1; \
	$(CARGO) run --quiet --release -p harness --bin bench -- $(BENCH)/guest.json || status=1; \
	$(CARGO) run --quiet --release -p harness --bin bench_driver -- $(BENCH)/driver.json || status=1; \
	$(CARGO) run --quiet --release -p harness --bin bench_mediate -- $(BENCH)/mediate_guest.json || status=1; \
	$(CARGO) run --quiet --release -p bench -- --report --output $(BENCH) \
		$(foreach suite,guest driver mediate_guest,--add $(BENCH)/$(suite).json) \
		$(if $(wildcard $(KEPT)),--compare $(KEPT)) --keep $(KEPT) || status=1; \
	exit $$status

# A test fails when they differ from what is committed.
docs: tools-build
	VNVME_WRITE_DOCS=1 $(CARGO) test -p vnvme --bin vnvme reference
	VNVME_WRITE_DOCS=1 $(CARGO) test -p metrics documents
	VNVME_WRITE_DOCS=1 $(CARGO) test -p control --lib reference
	VNVME_WRITE_DOCS=1 $(CARGO) test -p conformance --lib matrix

# As root, usually; what is installed was built before, by whom it may be.
export DESTDIR PREFIX
install: $(RELEASE)/vnvme
	packaging/install.sh install "$(RELEASE)/vnvme"

uninstall:
	packaging/install.sh uninstall "$(RELEASE)/vnvme"

$(RELEASE)/vnvme:
	$(CARGO) build --release -p vnvme

package: tools-build
	$(CARGO) build --release -p vnvme
	packaging/deb.sh "$(RELEASE)/vnvme" target/debian

# ARCHITECTURES: amd64, arm64 or both.
PACKAGES = $(TARGET)/packages
packages: tools-build
	rm -rf $(PACKAGES)
	packaging/build.sh $(PACKAGES) $(ARCHITECTURES)

release: packages
	packaging/release.sh $(PACKAGES)

# The tests of the package under systemd, with the program and the package as they are given away.
DIST = $(TARGET)/$(shell uname -m)-unknown-linux-gnu/dist/vnvme
test-packages: tools-guest packages
	testing/harness/setup.sh image
	testing/harness/image.sh $(PACKAGES)/vnvme-*-$(shell uname -m).oci.tar $(DIST)
	VNVME_PACKAGES=$(PACKAGES) VNVME_BIN=$(DIST) $(CARGO) test --quiet --workspace --test guests -- systemd::package

# What is built without optimisation writes the book in seconds.
MDBOOK = $(CURDIR)/target/tools/bin/mdbook
book: tools-build
	[ -x $(MDBOOK) ] || $(CARGO) install --quiet --locked --debug --root $(CURDIR)/target/tools \
		--no-default-features --features search --version 0.5.4 mdbook
	packaging/book/build.sh $(MDBOOK) $(TARGET)/book

# What compiling needs: a linker.
tools-build:
	@testing/harness/setup.sh build

# What the suite cost needs besides: valgrind.
tools-bench:
	@testing/harness/setup.sh bench $(CURDIR)/target/tools

# What the tests need besides: cryptsetup, nbdinfo and nbdcopy.
tools-tests:
	@testing/harness/setup.sh tests $(CURDIR)/target/tools

# What the guest needs besides: apt-get and dpkg-deb, to fetch Debian packages into target/harness.
tools-guest: tools-build
	@testing/harness/setup.sh guest
