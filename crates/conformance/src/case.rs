//! A case, as its table has it.

use crate::host::Host;
use crate::verdict::Check;

/// Whether every controller has to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Every I/O controller on PCIe.
    Always,
    /// Those that say that they have this.
    If(&'static str),
}

/// What is done before the case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// The controller is disabled.
    Disabled,
    /// It is enabled, with admin queues.
    Admin,
    /// There is I/O queue pair 1, too.
    Io,
    /// The same by a second controller of the subsystem, which is [`Host`] number two.
    Pair,
}

/// One case.
pub struct Case {
    /// Its name, unique.
    pub name: &'static str,
    /// Entries of the test plan that it stands for; none is one of our own.
    pub plan: &'static [&'static str],
    /// What is required.
    pub title: &'static str,
    /// Where the standard requires it.
    pub section: &'static str,
    /// Of whom.
    pub need: Need,
    /// What is done before.
    pub setup: Setup,
    /// What is done and looked at.
    pub run: Run,
}

/// The function of a case.
#[derive(Clone, Copy)]
pub enum Run {
    /// With one host.
    One(fn(&mut Host) -> Check),
    /// With the hosts of two controllers of one subsystem.
    Two(fn(&mut Host, &mut Host) -> Check),
}

/// The rows of a module: name of the function, plan, need, setup, section, title.
macro_rules! cases {
    ($($name:ident, [$($plan:literal),*], $need:expr, $setup:ident, $section:literal,
        $title:literal;)*) => {
        /// The cases of this module.
        pub(super) const CASES: &[$crate::case::Case] = &[$($crate::case::Case {
            name: stringify!($name),
            plan: &[$($plan),*],
            title: $title,
            section: $section,
            need: $need,
            setup: $crate::case::Setup::$setup,
            run: $crate::case::Run::One($name),
        },)*];
    };
}

/// The same for cases with two hosts.
macro_rules! pair_cases {
    ($($name:ident, [$($plan:literal),*], $need:expr, $section:literal, $title:literal;)*) => {
        /// The cases of this module that have two hosts.
        pub(super) const PAIR_CASES: &[$crate::case::Case] = &[$($crate::case::Case {
            name: stringify!($name),
            plan: &[$($plan),*],
            title: $title,
            section: $section,
            need: $need,
            setup: $crate::case::Setup::Pair,
            run: $crate::case::Run::Two($name),
        },)*];
    };
}

pub(crate) use {cases, pair_cases};
