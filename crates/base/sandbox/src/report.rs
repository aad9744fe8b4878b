//! Report of the restrictions in force.

use rustix::thread::CapabilitySet;
use std::fmt;

/// Landlock rules that the kernel enforces for the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landlock {
    /// Rights of this ABI: files from 1, TCP from 4, signals and abstract sockets from 6.
    Abi(u32),
    /// No rules: Landlock is built into the kernel but not enabled (`lsm=`).
    NotEnabled,
    /// No rules: the kernel was built without Landlock, or is older than 5.13.
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

/// Rights that the process has given up, and rights that it keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxReport {
    /// Restrictions of file paths, network and other processes.
    pub landlock: Landlock,
    /// Linux capabilities that the process keeps.
    pub capabilities: CapabilitySet,
    /// Names of threads that were started before, and have not dropped their rights
    /// ([`leave_nothing`](crate::leave_nothing)): a mistake of the program.
    pub outside: Vec<String>,
    /// There is a list of system calls for this architecture, and the kernel has seccomp.
    pub seccomp: bool,
}

impl SandboxReport {
    /// Returns a description of the missing parts; `None` when the sandbox is complete.
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

    /// Returns the names of the Linux capabilities that the process keeps.
    pub fn capabilities(&self) -> Vec<String> {
        let names = self.capabilities.iter_names();
        names.map(|(name, _)| format!("CAP_{name}")).collect()
    }
}

impl fmt::Display for SandboxReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "landlock: {}", self.landlock)?;
        if self.seccomp {
            f.write_str("; seccomp: on")?
        } else {
            f.write_str("; seccomp: off")?
        }
        match self.capabilities().as_slice() {
            [] => f.write_str("; capabilities: none"),
            kept => write!(f, "; capabilities: {}", kept.join(" ")),
        }
    }
}
