# vnvme - each target is alone enough on a fresh Debian or Ubuntu machine with git, make and a Rust toolchain.
#
#   make demo    a disk served to a real Linux guest, end to end
#   make quick   formatting, lints and the unit tests that are fast: before each commit
#   make check   formatting, lints, documentation, AArch64, the minimal build, licences
#   make test    check, then unit, property, socket and guest tests, instruction counts, and ten seconds of each fuzz target
#   make msrv    everything with the oldest Rust that Cargo.toml promises, where rustup has it
#   make deny    licences, sources and known vulnerabilities of all dependencies, by cargo-deny
#   make fuzz    the fuzz targets, FUZZ_SECONDS each (default 600)
#   make conformance  the cases of the public NVMe test plans, against vnvme (docs/conformance.md)
#   make cost    instructions for each I/O, held against bench/ceilings.toml
#   make bench   the benchmarks
#   make docs    docs/reference.md, the man pages in docs/man, docs/metrics.md and docs/conformance.md, from their tables; docs/openapi.json
#   make help    these lines

CARGO ?= cargo
FUZZ_SECONDS ?= 600
export CARGO

# Not written in a recipe: make would run such a line even where it is to print them only.
AGAIN = $(MAKE) --no-print-directory

.DEFAULT_GOAL := demo
.PHONY: demo quick test test-all prebuild check msrv deny conformance cost fuzz bench docs install uninstall package help \
	tools-build tools-guest tools-bench

# Both programs by one build: each by itself has other features of what they share, and has it built
# again.
demo: tools-guest
	$(CARGO) build --release -p vnvme -p harness --bin vnvme --bin demo
	VNVME_BIN=$(abspath $(RELEASE))/vnvme $(RELEASE)/demo

help:
	@sed -n 's/^#   make /  make /p' Makefile

# Crates whose tests take longer than a few seconds, or need more than a compiler.
SLOW = ap bench doorbell harness fuzz load soak volume worker vhost-blk driver ap-plugin
quick: tools-build
	harness/setup.sh check
	harness/words.sh
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) test --workspace --lib --bins $(SLOW:%=--exclude %)

# What tests skip is printed at the end; in CI a skip that .ci/skips does not list is a failure.
test:
	harness/skips.sh $(AGAIN) test-all

test-all: check tools-guest
	$(CARGO) build $(PROGRAMS:%=--package %) --bins --example vfio_selftest
	mkdir -p $(BUILT)
	cp $(DEBUG)/vnvme $(DEBUG)/prepare $(DEBUG)/lanes $(DEBUG)/soak $(DEBUG)/examples/vfio_selftest $(BUILT)
	$(BUILT)/prepare
	nice -n 19 $(AGAIN) prebuild >target/prebuild.log 2>&1 & \
	status=0; VNVME_PROGRAMS=$(BUILT) $(BUILT)/lanes $(LANES) || status=$$?; wait; exit $$status
	$(CARGO) test -p vnvme --no-default-features --bin vnvme parts::
	$(MODELS)
	$(AGAIN) cost
	fuzz/run.sh 10

LANES = --beside vnvme --beside harness --alone hostile --alone clients \
	$(foreach long,stock_driver ublk survival rbd zones vfio lifecycle reservations,--early $(long))

# What guests run, by one build: each by itself has other features of what they share, and has it built again. And so has what is
# tested, which takes the place of these.
PROGRAMS = vnvme harness soak driver
DEBUG = $(or $(CARGO_TARGET_DIR),target)/debug
BUILT = $(CURDIR)/target/programs

# What the last steps of `test` want, built while its guests leave a processor idle: the linking of the program as it is released
# takes minutes of one. What fails here is told of by the step that wants it.
prebuild: tools-bench
	-$(CARGO) build --release -p vnvme
	-$(MODELS) --no-run
	-fuzz/run.sh build
	-$(CARGO) build -p bench

# Models that take far more steps in optimised code.
MODELS = $(CARGO) test --profile fast -p driver --lib --test mapper

check: tools-build
	harness/setup.sh check
	harness/words.sh
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
	$(CARGO) clippy -p vnvme --no-default-features -- -D warnings
	$(CARGO) test --quiet -p testkit --test dependencies
	if harness/setup.sh aarch64; then $(CARGO) check --workspace --target aarch64-unknown-linux-gnu; fi

# A skip is a failure with CI set: .ci/skips lists none of these two.
msrv: tools-build
	harness/skips.sh harness/msrv.sh

deny: tools-build
	harness/skips.sh harness/deny.sh

# What is counted is the program as it is released. Built by itself: together with other packages it could have other
# features of its dependencies, and so be another program.
RELEASE = $(or $(CARGO_TARGET_DIR),target)/release
cost: export PATH := $(PATH):$(CURDIR)/target/tools/bin
cost: tools-build tools-bench
	$(CARGO) build --release -p vnvme
	$(CARGO) run --quiet -p bench -- --suite cost --vnvme $(RELEASE)/vnvme --ceilings bench/ceilings.toml --output target/cost

# As it is released; each program by itself, as `cost` says. Every wait in it is bounded; so is the whole.
conformance: tools-build
	$(CARGO) build --release -p vnvme
	$(CARGO) build -p conformance
	timeout 900 $(or $(CARGO_TARGET_DIR),target)/debug/conformance --vnvme $(abspath $(RELEASE))/vnvme

fuzz: tools-build
	fuzz/run.sh $(FUZZ_SECONDS)

# Figures go to target/bench/results.json and report.html. What cannot be measured here is named, with the reason.
BENCH = target/bench
# Medians of the run before, by machine.
KEPT = target/bench-kept
bench: export PATH := $(PATH):$(CURDIR)/target/tools/bin
bench: tools-build tools-bench
	$(CARGO) build --release -p vnvme
	$(CARGO) build --release -p bench -p harness
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

# What compiling needs: a linker.
tools-build:
	@harness/setup.sh build

# What the suite cost needs besides: valgrind.
tools-bench:
	@harness/setup.sh bench $(CURDIR)/target/tools

# What the guest needs besides: apt-get and dpkg-deb, to fetch Debian packages into target/harness.
tools-guest: tools-build
	@harness/setup.sh guest
