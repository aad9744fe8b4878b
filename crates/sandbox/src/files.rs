//! Files by their paths, the network and other processes: Landlock.

use crate::{Error, Landlock, Needs};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, LandlockStatus, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use std::path::Path;

/// The newest rights that this crate was tried with or read the kernel's source for; an older
/// kernel enforces those that it has.
const NEWEST: ABI = ABI::V10;

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
    for directory in &needs.remove_in {
        let directory = match directory.as_os_str().is_empty() {
            true => Path::new("."),
            false => directory,
        };
        let directory = PathFd::new(directory)?;
        rules = rules.add_rule(PathBeneath::new(directory, AccessFs::RemoveFile))?;
    }
    Ok(rules.restrict_self()?)
}
