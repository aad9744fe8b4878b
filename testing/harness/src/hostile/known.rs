//! Known failures of bounds, each with its reason. `make test-guests` accepts only these. A failure
//! that shows each time has to be removed from the list when its bound begins to hold.

/// Known failure of an attack.
pub(super) struct KnownFailure {
    pub(super) attack: &'static str,
    /// Names of failures in [`super::outcome::AttackOutcome::failures`].
    pub(super) fails: &'static [&'static str],
    /// The failure shows in each run, also a short one: if it does not, it is mended.
    pub(super) always: bool,
    pub(super) why: &'static str,
}

const fn known(
    attack: &'static str,
    fails: &'static [&'static str],
    why: &'static str,
) -> KnownFailure {
    KnownFailure {
        attack,
        fails,
        always: true,
        why,
    }
}

/// Creates a failure that shows in some runs only.
const fn at_times(
    attack: &'static str,
    fails: &'static [&'static str],
    why: &'static str,
) -> KnownFailure {
    KnownFailure {
        always: false,
        ..known(attack, fails, why)
    }
}

/// All of them.
pub(super) const KNOWN: &[KnownFailure] = &[
    known(
        "silent-volume",
        &["end"],
        "the kernel keeps a process of which a thread waits for a FUSE server; its sockets and all \
         other volumes are free by then",
    ),
    at_times(
        "punched-memory",
        &["ratio", "read", "blocked"],
        "a page fault waits while the kernel punches the client's memory",
    ),
    at_times(
        "flushes",
        &["ratio"],
        "alone on two processors six of seven runs hold (0.53, 0.82 to 10.9): each fsync is a \
         thread of the kernel's, one at a time, which shares a processor with the worker",
    ),
];
