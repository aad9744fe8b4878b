//! Admission of hosts: limits on the associations of a subsystem, per host, per address, and for
//! hosts that have not authenticated.
//!
//! - A host has at most [`TargetLimits::host_associations`], and their memory comes from one
//!   budget per host.
//! - With a list of hosts, a slot is reserved for each listed host without an association, up to
//!   half of all slots. The name of a host with a key is not trusted before it has authenticated:
//!   until then, the association counts in a small separate pool.
//! - If any host may connect, its name proves nothing. An eighth of the slots is reserved for
//!   addresses without an association.
//! - If the pool of unauthenticated associations is full, the oldest one of the address with the
//!   most is closed, so that an attacker without the secret displaces itself.

use crate::handshake::Connected;
use crate::target::{AssociationMessage, TargetConfig, TargetLimits};
use nvme::Status;
use nvme::fabrics::status;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use volume::Inbox;

/// Largest valid controller ID; higher values are reserved.
const LAST_CNTLID: u16 = 0xffef;

/// Whether an association counts among those of authenticated hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// The host has authenticated, or does not have to.
    Admitted,
    Authenticating,
    /// The association has to end to make room for another one, and has not ended yet.
    Displaced,
}

struct Member {
    /// Inbox of the association; `None` until the association is created.
    inbox: Option<Arc<Inbox<AssociationMessage>>>,
    hostnqn: String,
    hostid: [u8; 16],
    address: Option<IpAddr>,
    standing: Standing,
    memory: u32,
    /// Number by which associations are ordered by their arrival.
    number: u64,
    /// Number of connections on their way to the association.
    coming: u16,
}

/// Associations of hosts with a subsystem, by controller ID.
#[derive(Default)]
pub(crate) struct Members {
    /// Controller ID that was assigned last.
    last: u16,
    arrived: u64,
    open: BTreeMap<u16, Member>,
}

impl Members {
    /// Checks whether the association named in a Connect command exists and belongs to its host.
    pub(crate) fn owns(&mut self, connected: &Connected) -> Result<(), Status> {
        self.member(connected).map(drop)
    }

    fn member(&mut self, connected: &Connected) -> Result<&mut Member, Status> {
        let member = self.open.get_mut(&connected.data.cntlid.get());
        let Some(member) = member.filter(|member| member.inbox.is_some()) else {
            return Err(status::CONNECT_INVALID_PARAMETERS);
        };
        if connected.data.hostid != member.hostid || connected.hostnqn != member.hostnqn {
            return Err(status::CONNECT_INVALID_HOST);
        }
        Ok(member)
    }

    pub(crate) fn hosts(&self) -> Vec<String> {
        let entered = self.open.values().filter(|member| member.inbox.is_some());
        entered.map(|member| member.hostnqn.clone()).collect()
    }

    pub(crate) fn mails(&self) -> impl Iterator<Item = &Inbox<AssociationMessage>> {
        self.open
            .values()
            .filter_map(|member| member.inbox.as_deref())
    }

    /// Reserves a controller ID for a new association. Returns it with the size in bytes of the
    /// memory for the data of its commands.
    pub(crate) fn reserve(
        &mut self,
        config: &TargetConfig,
        connected: &Connected,
    ) -> Result<(u16, u32), Status> {
        let (hostnqn, address) = (&connected.hostnqn, connected.address);
        self.has_room(config, hostnqn, address)?;
        let standing = if config.keys.is_empty() {
            Standing::Admitted
        } else {
            self.displace(config.limits.authenticating)?;
            Standing::Authenticating
        };
        let memory = self.memory(&config.limits, hostnqn);
        let mut id = self.last;
        loop {
            // An ID is not reused soon: a host that does not know of the end would reach another
            // host's association.
            id = if id >= LAST_CNTLID { 1 } else { id + 1 };
            if !self.open.contains_key(&id) {
                break;
            }
        }
        self.last = id;
        self.arrived += 1;
        let member = Member {
            inbox: None,
            hostnqn: hostnqn.clone(),
            hostid: connected.data.hostid,
            address,
            standing,
            memory,
            number: self.arrived,
            coming: 0,
        };
        self.open.insert(id, member);
        Ok((id, memory))
    }

    /// Checks whether the limits allow one more association of a host that has authenticated, or
    /// need not.
    fn has_room(
        &self,
        config: &TargetConfig,
        hostnqn: &str,
        address: Option<IpAddr>,
    ) -> Result<(), Status> {
        let admitted = || {
            let members = self.open.values();
            members.filter(|member| member.standing == Standing::Admitted)
        };
        let of_host = |name: &str| admitted().filter(|member| member.hostnqn == name).count();
        let listed = || {
            let keys = config.keys.iter().map(|key| &key.nqn);
            config.hosts.iter().chain(keys)
        };
        let all = config.limits.associations;
        let own = of_host(hostnqn);
        let reserved = if listed().next().is_some() {
            // A host that is in both lists counts twice, which only makes the reserve larger than
            // necessary.
            let absent = listed().filter(|name| of_host(name) == 0).count();
            if own == 0 { 0 } else { absent.min(all / 2) }
        } else {
            let has_address = admitted().any(|member| member.address == address);
            if has_address { all / 8 } else { 0 }
        };
        let is_full = admitted().count() + reserved >= all;
        if is_full || own >= config.limits.host_associations {
            return Err(status::CONNECT_CONTROLLER_BUSY);
        }
        Ok(())
    }

    /// Makes room for one more unauthenticated association: if the pool is full, ends one of the
    /// address that has the most of them.
    fn displace(&mut self, most: usize) -> Result<(), Status> {
        let of = |standing| {
            let members = self.open.values();
            members.filter(move |member| member.standing == standing)
        };
        let waiting = of(Standing::Authenticating).count();
        if waiting < most {
            return Ok(());
        }
        // Displaced associations end on their workers, but not on a worker that is stuck.
        if of(Standing::Displaced).count() >= most {
            return Err(status::CONNECT_CONTROLLER_BUSY);
        }
        let from = |address| {
            let waiting = of(Standing::Authenticating);
            waiting.filter(|member| member.address == address).count()
        };
        let oldest = of(Standing::Authenticating)
            .filter(|member| member.inbox.is_some())
            .max_by_key(|member| (from(member.address), std::cmp::Reverse(member.number)))
            .map(|member| member.number);
        let mut members = self.open.values_mut();
        let Some(member) = members.find(|member| Some(member.number) == oldest) else {
            return Err(status::CONNECT_CONTROLLER_BUSY);
        };
        member.standing = Standing::Displaced;
        if let Some(inbox) = &member.inbox {
            inbox.put(AssociationMessage::Displaced);
        }
        Ok(())
    }

    /// Returns the memory size in bytes of one more association of a host: the full size while the
    /// host has used less than half of its budget, then less and less.
    fn memory(&self, limits: &TargetLimits, hostnqn: &str) -> u32 {
        // Hosts in authentication exchange short messages only.
        let own = self
            .open
            .values()
            .filter(|member| member.standing == Standing::Admitted && member.hostnqn == hostnqn);
        let used: u64 = own.map(|member| u64::from(member.memory)).sum();
        let quarter = limits.host_memory.saturating_sub(used) / 4;
        let quarter = u32::try_from(quarter).unwrap_or(u32::MAX);
        quarter.clamp(limits.least_memory(), limits.memory)
    }

    pub(crate) fn enter(&mut self, cntlid: u16, inbox: &Arc<Inbox<AssociationMessage>>) {
        if let Some(member) = self.open.get_mut(&cntlid) {
            member.inbox = Some(inbox.clone());
        }
    }

    pub(crate) fn authenticated(
        &mut self,
        config: &TargetConfig,
        cntlid: u16,
    ) -> Result<(), Status> {
        let member = self.open.get(&cntlid);
        let member = member.ok_or(status::CONNECT_CONTROLLER_BUSY)?;
        if member.standing == Standing::Authenticating {
            self.has_room(config, &member.hostnqn, member.address)?;
        }
        if let Some(member) = self.open.get_mut(&cntlid) {
            member.standing = Standing::Admitted;
        }
        Ok(())
    }

    pub(crate) fn leave(&mut self, cntlid: u16) {
        self.open.remove(&cntlid);
    }

    pub(crate) fn pass(
        &mut self,
        connected: Box<Connected>,
        most: u16,
    ) -> Result<(), (Box<Connected>, Status)> {
        match self.member(&connected) {
            Ok(member) if member.coming < most => {
                member.coming += 1;
                if let Some(inbox) = &member.inbox {
                    inbox.put(AssociationMessage::Connected(connected));
                }
                Ok(())
            }
            Ok(_) => Err((connected, status::CONNECT_CONTROLLER_BUSY)),
            Err(why) => Err((connected, why)),
        }
    }

    pub(crate) fn passed(&mut self, cntlid: u16) {
        if let Some(member) = self.open.get_mut(&cntlid) {
            member.coming = member.coming.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_all_associations_of_a_host_stays_near_its_budget() {
        let limits = TargetLimits::default();
        let mut members = Members::default();
        let mut sum = 0;
        for number in 0..limits.host_associations as u64 {
            let memory = members.memory(&limits, "host");
            assert!((limits.least_memory()..=limits.memory).contains(&memory));
            sum += u64::from(memory);
            let member = Member {
                inbox: None,
                hostnqn: "host".into(),
                hostid: [0; 16],
                address: None,
                standing: Standing::Admitted,
                memory,
                number,
                coming: 0,
            };
            members.open.insert(number as u16, member);
        }
        let least = u64::from(limits.least_memory()) * limits.host_associations as u64;
        assert!(sum <= limits.host_memory + least, "{sum}");
        assert_eq!(members.memory(&limits, "another host"), limits.memory);
    }
}
