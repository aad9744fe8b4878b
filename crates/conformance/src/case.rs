//! A case, as its table has it.

use crate::host::Host;
use crate::verdict::Check;

/// Controllers that have to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Every I/O controller on PCIe.
    Always,
    /// Controllers that report this capability.
    If(&'static str),
}

/// Preparation before the case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// The controller is disabled.
    Disabled,
    /// The controller is enabled, with admin queues.
    Admin,
    /// There is I/O queue pair 1, too.
    Io,
    /// I/O queue pair 1 on two controllers of the subsystem; the second is [`Host`] number two.
    Pair,
}

/// A conformance case.
pub struct Case {
    /// Unique name.
    pub name: &'static str,
    /// Entries of the test plan that it stands for; none is one of our own.
    pub plan: &'static [&'static str],
    /// Requirement that the case checks.
    pub title: &'static str,
    /// Section of the standard that requires it.
    pub section: &'static str,
    /// Controllers that have to pass.
    pub need: Need,
    /// Preparation before the case.
    pub setup: Setup,
    /// Function that runs the case.
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

/// Builds the table of cases with two hosts.
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
