//! Landlock rules: files by their paths, the network and other processes.

use crate::{Connect, Error, Landlock, Needs};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort,
    PathBeneath, PathFd, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope, make_bitflags,
};
use std::path::{Path, PathBuf};

/// Newest Landlock ABI that was tested or checked against the kernel's source. An older kernel
/// enforces the rights that it supports.
const NEWEST: ABI = ABI::V10;

/// Landlock rights on files and devices that may be opened.
const OPEN_FILE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | WriteFile | Truncate | IoctlDev
});
/// Rights in directories below which files may be opened. They include connecting to a socket, by
/// which a server finds out whether another process listens there.
const OPEN_BELOW: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadDir | MakeReg | MakeSock | RemoveFile | ResolveUnix
});

/// Landlock rights in directories in which files may be created and removed.
const FILES_IN: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | WriteFile | Truncate | ReadDir | MakeReg | RemoveFile
});

/// Reach of a Landlock domain: which other processes may get signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DomainScope {
    /// The process: it may send no signal outside.
    Process,
    /// A single thread, which may send signals to the process's remaining threads: kernels before
    /// 6.15 treat those of another domain as foreign.
    Thread,
}

/// Enforces Landlock rules that leave only the needed rights.
pub(crate) fn restrict(needs: &Needs, reach: DomainScope) -> Result<Landlock, Error> {
    let status = ruleset(needs, reach).map_err(Error::Files)?;
    Ok(match (status.landlock, status.ruleset) {
        (LandlockStatus::NotImplemented, _) => Landlock::NotImplemented,
        (LandlockStatus::NotEnabled, _) => Landlock::NotEnabled,
        (_, RulesetStatus::NotEnforced) => Landlock::NotEnabled,
        (LandlockStatus::Available { effective_abi, .. }, _) => Landlock::Abi(effective_abi as u32),
    })
}

/// Rights to make and remove files.
const MAKE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    MakeReg | MakeDir | MakeSym | MakeSock | MakeFifo | MakeChar | MakeBlock
        | RemoveFile | RemoveDir | Refer
});

/// Removes the rights to make and remove files, except sockets below these directories.
pub(crate) fn restrict_to_sockets(below: &[PathBuf]) -> Result<(), Error> {
    let restricted = || -> Result<(), RuleError> {
        let mut rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(MAKE)?
            .create()?;
        for place in below.iter().filter(|path| path.is_dir()) {
            let rights = AccessFs::MakeSock | AccessFs::RemoveFile;
            rules = rules.add_rule(PathBeneath::new(PathFd::new(place)?, rights))?;
        }
        rules.restrict_self()?;
        Ok(())
    };
    restricted().map_err(Error::Files)
}

type RuleError = Box<dyn std::error::Error + Send + Sync>;

fn ruleset(needs: &Needs, reach: DomainScope) -> Result<RestrictionStatus, RuleError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?;
    if reach == DomainScope::Process {
        rules = rules.scope(Scope::from_all(NEWEST))?;
    }
    let mut rules = rules.create()?;
    for directory in needs.read_in.iter().filter(|path| path.is_dir()) {
        let directory = PathFd::new(directory)?;
        rules = rules.add_rule(PathBeneath::new(directory, AccessFs::ReadFile))?;
    }
    for place in needs.read_below.iter().filter(|path| path.exists()) {
        let rights = if place.is_dir() {
            AccessFs::ReadFile | AccessFs::ReadDir
        } else {
            AccessFs::ReadFile.into()
        };
        rules = rules.add_rule(PathBeneath::new(PathFd::new(place)?, rights))?;
    }
    for place in needs.open_below.iter().filter(|path| path.exists()) {
        let rights = if place.is_dir() {
            OPEN_FILE | OPEN_BELOW
        } else {
            OPEN_FILE
        };
        rules = rules.add_rule(PathBeneath::new(PathFd::new(place)?, rights))?;
    }
    for directory in needs.files_in.iter().filter(|path| path.exists()) {
        let directory = PathFd::new(directory)?;
        rules = rules.add_rule(PathBeneath::new(directory, FILES_IN))?;
    }
    for directory in &needs.remove_in {
        let directory = if directory.as_os_str().is_empty() {
            Path::new(".")
        } else {
            directory
        };
        if directory.exists() {
            let directory = PathFd::new(directory)?;
            rules = rules.add_rule(PathBeneath::new(directory, AccessFs::RemoveFile))?;
        }
    }
    for connect in &needs.connect {
        rules = match connect {
            Connect::Tcp(port) => rules.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?,
            Connect::UnixIn(directory) if !directory.exists() => rules,
            Connect::UnixIn(directory) => {
                let directory = PathFd::new(directory)?;
                rules.add_rule(PathBeneath::new(directory, AccessFs::ResolveUnix))?
            }
        };
    }
    Ok(rules.restrict_self()?)
}
