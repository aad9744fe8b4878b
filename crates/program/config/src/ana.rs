//! Asymmetric namespace access (ANA): states of a subsystem's disks as options and the control API
//! name them.

use clap::ValueEnum;
use control::api;
use serde::Deserialize;

/// ANA state: how the disk's host reaches namespaces that other disks share
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnaState {
    /// Optimized: hosts prefer this disk
    #[default]
    Optimized,
    /// Usable: hosts use this disk when none is optimized
    NonOptimized,
    /// Unusable through this disk for now
    Inaccessible,
    /// Unusable through this disk for ever
    PersistentLoss,
    /// Transition: hosts repeat their commands. Linux resets a disk that stays in this state for 20
    /// seconds
    Change,
}

impl From<AnaState> for api::AnaState {
    fn from(state: AnaState) -> Self {
        match state {
            AnaState::Optimized => Self::Optimized,
            AnaState::NonOptimized => Self::NonOptimized,
            AnaState::Inaccessible => Self::Inaccessible,
            AnaState::PersistentLoss => Self::PersistentLoss,
            AnaState::Change => Self::Change,
        }
    }
}

impl From<api::AnaState> for AnaState {
    fn from(state: api::AnaState) -> Self {
        match state {
            api::AnaState::Optimized => Self::Optimized,
            api::AnaState::NonOptimized => Self::NonOptimized,
            api::AnaState::Inaccessible => Self::Inaccessible,
            api::AnaState::PersistentLoss => Self::PersistentLoss,
            api::AnaState::Change => Self::Change,
        }
    }
}

impl From<AnaState> for nvme::log::AnaState {
    fn from(state: AnaState) -> Self {
        match state {
            AnaState::Optimized => Self::OPTIMIZED,
            AnaState::NonOptimized => Self::NON_OPTIMIZED,
            AnaState::Inaccessible => Self::INACCESSIBLE,
            AnaState::PersistentLoss => Self::PERSISTENT_LOSS,
            AnaState::Change => Self::CHANGE,
        }
    }
}
