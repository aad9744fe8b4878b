//! Definition of a conformance case.

use crate::host::Host;
use crate::verdict::Check;

/// Controllers that must pass a conformance case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Every I/O controller on PCIe.
    Always,
    /// Controllers that report the named capability.
    If(&'static str),
}

/// State into which the controller is brought before a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// The controller stays disabled.
    Disabled,
    /// The controller is enabled with Admin queues.
    Admin,
    /// The controller is enabled, and I/O queue pair 1 is created.
    Io,
    /// I/O queue pair 1 is created on two controllers of the subsystem, each with its own [`Host`].
    Pair,
}

/// Conformance case: one requirement of the standard, and the function that checks it.
pub struct Case {
    /// Unique name of the case.
    pub name: &'static str,
    /// Entries of the public test plan that the case covers; empty if there is none.
    pub plan: &'static [&'static str],
    /// Requirement of the standard that the case checks.
    pub title: &'static str,
    /// Section of the standard that contains the requirement.
    pub section: &'static str,
    /// Controllers that must pass the case.
    pub need: Need,
    /// State into which the controller is brought before the case.
    pub setup: Setup,
    /// Function that executes the case.
    pub run: Run,
}

/// Function that executes a conformance case.
#[derive(Clone, Copy)]
pub enum Run {
    /// Function that uses one host.
    One(fn(&mut Host) -> Check),
    /// Function that uses the hosts of two controllers of one subsystem.
    Two(fn(&mut Host, &mut Host) -> Check),
}

/// Builds a module's table of cases. Row: name of the function, plan, need, setup, section, title.
macro_rules! cases {
    ($($name:ident, [$($plan:literal),*], $need:expr, $setup:ident, $section:literal,
        $title:literal;)*) => {
        /// Table of the conformance cases in this module.
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

/// Builds the table of a module's cases that use two hosts.
macro_rules! pair_cases {
    ($($name:ident, [$($plan:literal),*], $need:expr, $section:literal, $title:literal;)*) => {
        /// Table of the conformance cases in this module that use two hosts.
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
