//! Files by their paths, the network and other processes: Landlock.

use crate::{Connect, Error, Landlock, Needs};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort,
    PathBeneath, PathFd, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope, make_bitflags,
};
use std::path::Path;

/// The newest rights that this crate was tried with or read the kernel's source for; an older
/// kernel enforces those that it has.
const NEWEST: ABI = ABI::V10;

/// What may be done to files and devices that may be opened.
const OPEN_FILE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | WriteFile | Truncate | IoctlDev
});
/// What may be done in directories below which files may be opened: also to connect to a socket,
/// for a server finds out so whether another one listens there.
const OPEN_BELOW: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadDir | MakeReg | MakeSock | RemoveFile | ResolveUnix
});

/// What may be done in directories in which files come and go.
const FILES_IN: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | WriteFile | Truncate | ReadDir | MakeReg | RemoveFile
});

/// For whom a domain is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// For the process: no signal leaves it.
    Process,
    /// For one thread, which may send signals to the other threads: kernels before 6.15 take those
    /// of another domain for strangers.
    Thread,
}

/// Takes away everything but what is needed.
pub(crate) fn restrict(needs: &Needs, reach: Reach) -> Result<Landlock, Error> {
    let status = ruleset(needs, reach).map_err(Error::Files)?;
    Ok(match (status.landlock, status.ruleset) {
        (LandlockStatus::NotImplemented, _) => Landlock::NotImplemented,
        (LandlockStatus::NotEnabled, _) => Landlock::NotEnabled,
        (_, RulesetStatus::NotEnforced) => Landlock::NotEnabled,
        (LandlockStatus::Available { effective_abi, .. }, _) => Landlock::Abi(effective_abi as u32),
    })
}

type Refused = Box<dyn std::error::Error + Send + Sync>;

fn ruleset(needs: &Needs, reach: Reach) -> Result<RestrictionStatus, Refused> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?;
    if reach == Reach::Process {
        rules = rules.scope(Scope::from_all(NEWEST))?;
    }
    let mut rules = rules.create()?;
    for directory in needs.read_in.iter().filter(|path| path.is_dir()) {
        let directory = PathFd::new(directory)?;
        rules = rules.add_rule(PathBeneath::new(directory, AccessFs::ReadFile))?;
    }
    for place in needs.read_below.iter().filter(|path| path.exists()) {
        let rights = match place.is_dir() {
            true => AccessFs::ReadFile | AccessFs::ReadDir,
            false => AccessFs::ReadFile.into(),
        };
        rules = rules.add_rule(PathBeneath::new(PathFd::new(place)?, rights))?;
    }
    for place in needs.open_below.iter().filter(|path| path.exists()) {
        let rights = match place.is_dir() {
            true => OPEN_FILE | OPEN_BELOW,
            false => OPEN_FILE,
        };
        rules = rules.add_rule(PathBeneath::new(PathFd::new(place)?, rights))?;
    }
    for directory in needs.files_in.iter().filter(|path| path.exists()) {
        let directory = PathFd::new(directory)?;
        rules = rules.add_rule(PathBeneath::new(directory, FILES_IN))?;
    }
    for directory in &needs.remove_in {
        let directory = match directory.as_os_str().is_empty() {
            true => Path::new("."),
            false => directory,
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
