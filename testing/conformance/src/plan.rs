//! The public test plan: the UNH-IOL NVMe conformance test suite for PCIe controllers.
//!
//! Numbers are those of its editions for NVMe 1.3 (v9, 2018; groups 6 and 10) and for the NVM
//! command set 1.1 (v24, 2025; all remaining groups), as far as public copies contain them.
//! Requirements are stated in our own words. `1.3-4` is case 4 of test 1.3, `4.12` a whole test.
//! Where the number of a case is not known, or several cases try the same, a letter takes its
//! place: `1.4-a`.

use crate::case::Need::{self, Always, If};

/// Group of entries of the UNH-IOL conformance plan.
pub struct Group {
    /// Number and name of the group in the plan.
    pub title: &'static str,
    /// Entries of the group that no case covers.
    pub left_out: &'static [LeftOut],
}

/// Entry of the conformance plan that no case covers.
pub struct LeftOut {
    /// Number of the entry in the plan.
    pub id: &'static str,
    /// Requirement that the entry tests.
    pub title: &'static str,
    /// Controllers that must fulfil the requirement.
    pub need: Need,
    /// Reason why no case covers the entry.
    pub reason: &'static str,
}

macro_rules! left_out {
    ($($id:literal, $need:expr, $title:literal, $reason:literal;)*) => {
        &[$(LeftOut { id: $id, title: $title, need: $need, reason: $reason },)*]
    };
}

/// The groups, in the plan's order. An entry belongs to the group whose number it begins with.
pub const GROUPS: &[Group] = &[
    Group {
        title: "1 Admin command set",
        left_out: left_out![
            "1.6-e", If("OACS bit 1"), "Format NVM with cryptographic erase",
                "what was erased cannot be told from a key that was changed; 1.6-d tries user \
                 data erase";
            "1.7-6", If("SANICAP"), "the event of a sanitize operation that enters media \
             verification",
                "media verification is of NVMe Base 2.2; the cases know 2.1";
            "1.7-j", If("OAES bit 8"), "the event of a namespace that has changed",
                "a namespace is changed from outside of the controller; the guest tests do";
            "1.10-8", If("OACS bits 1 and 4"), "Format NVM aborts a short self-test",
                "not written";
            "1.11-7", If("OACS bits 1 and 4"), "Format NVM of all namespaces aborts an extended \
             self-test",
                "not written";
            "1.17-3", If("SANICAP"), "the saved value of No-Deallocate Response Mode",
                "not written";
            "1.17-13", If("SANICAP"), "a subsystem reset ends media verification",
                "media verification is of NVMe Base 2.2; the cases know 2.1";
            "1-j", If("OACS bit 2"), "firmware download and commit: slots, images, activation",
                "not written: a controller of ours has one slot that is read only";
            "1-k", If("OACS bit 0"), "Security Send and Receive",
                "not written: no protocol of security is common to all controllers";
            "1-m", If("OACS bit 7"), "virtualization management: resources of secondary \
             controllers",
                "not written";
            "1-o", If("OACS bit 6"), "NVMe-MI Send and Receive",
                "the management interface has a test plan of its own";
            "1.21-b", If("OACS bit 10"), "Lockdown: commands and features that are prohibited",
                "not written";
        ],
    },
    Group {
        title: "2 NVM command set",
        left_out: left_out![
            "2.8-2", If("CAP.CSS bit 0 is 0"), "atomic write sizes without the NVM command set",
                "a controller without the NVM command set has nothing for the other cases of the \
                 group";
            "2.10-a", Always, "writes up to AWUPF are whole after a power failure",
                "the power of a controller that is served cannot be cut from its socket; the \
                 power-cut tests of the program do";
            "2.3-c", Always, "reads with Dataset Management hints in dword 13",
                "hints have no effect that can be seen";
            "2.14-j", If("CDFS bits 1 and 3"), "Copy with descriptors of formats 1h and 3h",
                "not written: the cases use guards of 16 bits, if any";
        ],
    },
    Group {
        title: "3 NVM features",
        left_out: left_out![
            "3.4-4", If("HMPRE"), "the host memory buffer enabled twice",
                "not written: a controller of ours wants none";
            "3.4-b", If("HMPRE"), "the host memory buffer enabled, used, disabled",
                "not written: a controller of ours wants none";
            "3.5-a", If("RPMBS"), "replay protected memory blocks: keys, counters, reads and \
             writes",
                "not written: a controller of ours has none";
            "3.14-e", If("CMIC bit 3"), "commands in each ANA state",
                "states are changed from outside of the controller; the program's own tests do";
            "3.3-c", If("NPSS"), "non-operational power states and their times",
                "a power state of a virtual controller has no effect that can be seen";
        ],
    },
    Group {
        title: "4 Controller registers",
        left_out: left_out![
            "4-m", Always, "controller fatal status after an error within the controller",
                "an error within the controller cannot be caused from outside; 1.24-a sees \
                 CSTS.CFS";
            "4-n", If("CAP.CRMS bit 1"), "ready independent of media",
                "not written: a controller of ours is ready with its media";
        ],
    },
    Group {
        title: "5 System memory structure",
        left_out: left_out![
            "5.6-a", Always, "media errors: write fault, unrecovered read error",
                "a case cannot make a disk fail; the program's tests do, by faults below it";
        ],
    },
    Group {
        title: "6 Controller architecture",
        left_out: left_out![
            "6-c", If("INTx"), "interrupts by pin",
                "a VMM has the pin; the guest tests without MSI-X use it";
            "6-d", Always, "a cold reset: power off and on",
                "the power of a controller that is served cannot be cut from its socket; disks \
                 are restarted by the program's tests";
        ],
    },
    Group {
        title: "7 Reservations",
        left_out: left_out![
            "7-d", If("RESCAP bit 0"), "reservations that persist through a power loss",
                "the power of a controller that is served cannot be cut from its socket; the \
                 program's tests kill it and cut the power below its files";
        ],
    },
    Group {
        title: "8 Namespace management",
        left_out: &[],
    },
    Group {
        title: "9 Flexible data placement",
        left_out: &[],
    },
    Group {
        title: "10 System bus registers (2018); reachability groups (2025)",
        left_out: left_out![
            "10-j", If("reachability groups"), "reachability groups and associations",
                "of NVMe Base 2.1 for subsystems of several domains; not written";
            "10-k", If("MSI"), "interrupts by MSI",
                "not written: a controller of ours has MSI-X";
            "10-l", Always, "link capabilities, electrical and link training tests",
                "a virtual function has no link";
        ],
    },
    Group {
        title: "11 Boot partition",
        left_out: left_out![
            "11.1-e", If("CAP.BPS and OACS bit 2"), "boot partitions are written and protected \
             against that",
                "not written: those of a controller of ours are read only";
        ],
    },
    Group {
        title: "12 Host managed live migration",
        left_out: left_out![
            "12.1-a", If("OACS bit 11"), "migration by Migration Send and Receive, tracking of \
             memory",
                "of hosts that migrate physical functions; not written";
        ],
    },
];

/// Returns the number of the group that an entry of the plan belongs to.
pub fn group_of(id: &str) -> &str {
    let end = id.find(['.', '-']).unwrap_or(id.len());
    id.get(..end).unwrap_or(id)
}
