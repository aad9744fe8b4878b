//! What holds.

use rustix::thread::CapabilitySet;
use std::fmt;

/// What the kernel's Landlock enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landlock {
    /// The rights of this ABI: 1 knows files, 4 TCP, 6 signals and abstract sockets.
    Abi(u32),
    /// Nothing: it is built in, and not among the modules that were enabled (`lsm=`).
    NotEnabled,
    /// Nothing: the kernel was built without it, or is older than 5.13.
    NotImplemented,
}

impl fmt::Display for Landlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abi(number) => write!(f, "ABI {number}"),
            Self::NotEnabled => f.write_str("not enabled in this kernel (lsm=landlock,...)"),
            Self::NotImplemented => f.write_str("not in this kernel (needs Linux 5.13)"),
        }
    }
}

/// What a process has given up, and what it has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Files by their paths, the network, other processes.
    pub landlock: Landlock,
    /// Those that are left.
    pub capabilities: CapabilitySet,
    /// Names of threads that were started before, and have not left what they need not
    /// ([`leave_nothing`](crate::leave_nothing)): a mistake of the program.
    pub outside: Vec<String>,
    /// There is a list of system calls for this architecture, and the kernel has seccomp.
    pub seccomp: bool,
}

impl Report {
    /// What is missing of the whole, in words; `None` when it is whole.
    pub fn missing(&self) -> Option<String> {
        let mut missing = Vec::new();
        match self.landlock {
            Landlock::Abi(6..) => {}
            Landlock::Abi(abi @ 4..) => missing.push(format!(
                "signals and abstract sockets (Landlock ABI {abi} of 6, Linux 6.12)"
            )),
            Landlock::Abi(abi) => missing.push(format!(
                "TCP, signals and abstract sockets (Landlock ABI {abi} of 6, Linux 6.12)"
            )),
            absent => missing.push(format!("files by their paths (Landlock: {absent})")),
        }
        if !self.seccomp {
            missing.push("system calls (no list for this architecture, or no seccomp)".into());
        }
        if !self.outside.is_empty() {
            missing.push(format!("all of threads: {}", self.outside.join(", ")));
        }
        (!missing.is_empty()).then(|| missing.join(", "))
    }

    /// The capabilities that are left, by the kernel's names.
    pub fn capabilities(&self) -> Vec<String> {
        let names = self.capabilities.iter_names();
        names.map(|(name, _)| format!("CAP_{name}")).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "landlock: {}", self.landlock)?;
        match self.seccomp {
            true => f.write_str("; seccomp: on")?,
            false => f.write_str("; seccomp: off")?,
        }
        match self.capabilities().as_slice() {
            [] => f.write_str("; capabilities: none"),
            kept => write!(f, "; capabilities: {}", kept.join(" ")),
        }
    }
}
