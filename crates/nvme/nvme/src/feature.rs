//! Features, their values and data structures: NVMe Base 2.1, 5.1.25.
//!
//! The bitfields are the values of command dword 11 of Set Features and of
//! completion dword 0 of Get Features.

use bitfield_struct::bitfield;
use zerocopy::Unaligned;

use crate::log::CriticalWarning;
use crate::macros::open_values;

mod data;
mod placement;

pub use data::{HostBehavior, Timestamp, TimestampAttributes, TimestampOrigin};
pub use placement::{FdpEventDescriptor, FdpEventsCdw11, FdpMode};

open_values! {
    /// Feature Identifier (NVMe Base 2.1, figure 385).
    #[derive(Unaligned)]
    pub Fid: u8 {
        ARBITRATION = 0x01, "Arbitration";
        POWER_MANAGEMENT = 0x02, "Power Management";
        LBA_RANGE_TYPE = 0x03, "LBA Range Type";
        TEMPERATURE_THRESHOLD = 0x04, "Temperature Threshold";
        ERROR_RECOVERY = 0x05, "Error Recovery";
        VOLATILE_WRITE_CACHE = 0x06, "Volatile Write Cache";
        NUMBER_OF_QUEUES = 0x07, "Number of Queues";
        INTERRUPT_COALESCING = 0x08, "Interrupt Coalescing";
        INTERRUPT_VECTOR_CONFIG = 0x09, "Interrupt Vector Configuration";
        WRITE_ATOMICITY = 0x0a, "Write Atomicity Normal";
        ASYNC_EVENT_CONFIG = 0x0b, "Asynchronous Event Configuration";
        AUTONOMOUS_POWER_STATE_TRANSITION = 0x0c, "Autonomous Power State Transition";
        HOST_MEMORY_BUFFER = 0x0d, "Host Memory Buffer";
        TIMESTAMP = 0x0e, "Timestamp";
        KEEP_ALIVE_TIMER = 0x0f, "Keep Alive Timer";
        HOST_THERMAL_MANAGEMENT = 0x10, "Host Controlled Thermal Management";
        NON_OPERATIONAL_POWER_STATE_CONFIG = 0x11, "Non-Operational Power State Config";
        READ_RECOVERY_LEVEL_CONFIG = 0x12, "Read Recovery Level Config";
        PREDICTABLE_LATENCY_MODE_CONFIG = 0x13, "Predictable Latency Mode Config";
        PREDICTABLE_LATENCY_MODE_WINDOW = 0x14, "Predictable Latency Mode Window";
        LBA_STATUS_INFORMATION_ATTRIBUTES = 0x15, "LBA Status Information Attributes";
        HOST_BEHAVIOR_SUPPORT = 0x16, "Host Behavior Support";
        SANITIZE_CONFIG = 0x17, "Sanitize Config";
        ENDURANCE_GROUP_EVENT_CONFIG = 0x18, "Endurance Group Event Configuration";
        IO_COMMAND_SET_PROFILE = 0x19, "I/O Command Set Profile";
        SPINUP_CONTROL = 0x1a, "Spinup Control";
        POWER_LOSS_SIGNALING_CONFIG = 0x1b, "Power Loss Signaling Config";
        PERFORMANCE_CHARACTERISTICS = 0x1c, "Performance Characteristics";
        FLEXIBLE_DATA_PLACEMENT = 0x1d, "Flexible Data Placement";
        FDP_EVENTS = 0x1e, "Flexible Data Placement Events";
        NAMESPACE_ADMIN_LABEL = 0x1f, "Namespace Admin Label";
        KEY_VALUE_CONFIG = 0x20, "Key Value Configuration";
        CONTROLLER_DATA_QUEUE = 0x21, "Controller Data Queue";
        EMBEDDED_MANAGEMENT_CONTROLLER_ADDRESS = 0x78, "Embedded Management Controller Address";
        HOST_MANAGEMENT_AGENT_ADDRESS = 0x79, "Host Management Agent Address";
        ENHANCED_CONTROLLER_METADATA = 0x7d, "Enhanced Controller Metadata";
        CONTROLLER_METADATA = 0x7e, "Controller Metadata";
        NAMESPACE_METADATA = 0x7f, "Namespace Metadata";
        SOFTWARE_PROGRESS_MARKER = 0x80, "Software Progress Marker";
        HOST_IDENTIFIER = 0x81, "Host Identifier";
        RESERVATION_NOTIFICATION_MASK = 0x82, "Reservation Notification Mask";
        RESERVATION_PERSISTENCE = 0x83, "Reservation Persistence";
        NAMESPACE_WRITE_PROTECTION_CONFIG = 0x84, "Namespace Write Protection Config";
        BOOT_PARTITION_WRITE_PROTECTION_CONFIG = 0x85, "Boot Partition Write Protection Config";
    }
}

/// Value of [`Fid::ARBITRATION`] (NVMe Base 2.1, 5.1.25.1.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Arbitration {
    /// Arbitration Burst as a power of two; 7 for no limit.
    #[bits(3)]
    pub ab: u8,
    #[bits(5)]
    __: u8,
    /// Low Priority Weight, zero-based.
    pub lpw_z: u8,
    /// Medium Priority Weight, zero-based.
    pub mpw_z: u8,
    /// High Priority Weight, zero-based.
    pub hpw_z: u8,
}

/// Value of [`Fid::POWER_MANAGEMENT`] (NVMe Base 2.1, 5.1.25.1.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct PowerManagement {
    /// Power State.
    #[bits(5)]
    pub ps: u8,
    /// Workload Hint.
    #[bits(3)]
    pub wh: u8,
    #[bits(24)]
    __: u32,
}

/// Value of [`Fid::TEMPERATURE_THRESHOLD`] (NVMe Base 2.1, 5.1.25.1.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct TemperatureThreshold {
    /// Temperature Threshold in kelvins.
    pub tmpth: u16,
    /// Threshold Temperature Select.
    #[bits(4)]
    pub tmpsel: TemperatureSelect,
    /// Threshold Type Select.
    #[bits(2)]
    pub thsel: ThresholdType,
    /// Temperature Threshold Hysteresis, in kelvins.
    #[bits(3)]
    pub tmpthh: u8,
    #[bits(7)]
    __: u8,
}

open_values! {
    /// Threshold Temperature Select (4 bits).
    pub TemperatureSelect: u8 {
        COMPOSITE = 0x0, "Composite Temperature";
        SENSOR_1 = 0x1, "Temperature Sensor 1";
        SENSOR_2 = 0x2, "Temperature Sensor 2";
        SENSOR_3 = 0x3, "Temperature Sensor 3";
        SENSOR_4 = 0x4, "Temperature Sensor 4";
        SENSOR_5 = 0x5, "Temperature Sensor 5";
        SENSOR_6 = 0x6, "Temperature Sensor 6";
        SENSOR_7 = 0x7, "Temperature Sensor 7";
        SENSOR_8 = 0x8, "Temperature Sensor 8";
        ALL = 0xf, "All implemented temperature sensors (Set Features only)";
    }
}

open_values! {
    /// Threshold Type Select (2 bits).
    pub ThresholdType: u8 {
        OVER = 0, "Over Temperature Threshold";
        UNDER = 1, "Under Temperature Threshold";
    }
}

/// Value of [`Fid::ERROR_RECOVERY`] (NVM Command Set 1.1, 4.1.3); namespace specific.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ErrorRecovery {
    /// Time Limited Error Recovery, in units of 100 ms; 0 for no limit.
    pub tler: u16,
    /// Deallocated or Unwritten Logical Block Error Enable.
    pub dulbe: bool,
    #[bits(15)]
    __: u16,
}

/// Value of [`Fid::VOLATILE_WRITE_CACHE`] (NVMe Base 2.1, 5.1.25.1.4).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct VolatileWriteCache {
    /// Volatile Write Cache Enable.
    pub wce: bool,
    #[bits(31)]
    __: u32,
}

/// Value of [`Fid::NUMBER_OF_QUEUES`] (NVMe Base 2.1, 5.1.25.2.1): number of requested I/O queues
/// in dword 11, and of allocated ones in completion dword 0.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct NumberOfQueues {
    /// Number of I/O Submission Queues, zero-based; FFFFh is an invalid request.
    pub nsq_z: u16,
    /// Number of I/O Completion Queues, zero-based; FFFFh is an invalid request.
    pub ncq_z: u16,
}

/// Value of [`Fid::INTERRUPT_COALESCING`] (NVMe Base 2.1, 5.1.25.2.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct InterruptCoalescing {
    /// Aggregation Threshold in completions, zero-based.
    pub thr_z: u8,
    /// Aggregation Time, in units of 100 microseconds; 0 for no delay.
    pub time: u8,
    __: u16,
}

/// Value of [`Fid::INTERRUPT_VECTOR_CONFIG`] (NVMe Base 2.1, 5.1.25.2.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct InterruptVectorConfig {
    /// Interrupt Vector that the setting applies to.
    pub iv: u16,
    /// Coalescing Disable.
    pub cd: bool,
    #[bits(15)]
    __: u16,
}

/// Value of [`Fid::WRITE_ATOMICITY`] (NVM Command Set 1.1, 4.1.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct WriteAtomicity {
    /// Disable Normal: the host needs atomicity only at power failures, so AWUN does not apply.
    pub dn: bool,
    #[bits(31)]
    __: u32,
}

/// Value of [`Fid::ASYNC_EVENT_CONFIG`] (NVMe Base 2.1, 5.1.25.1.5): asynchronous events that the
/// host has enabled.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEventConfig {
    /// Critical warnings of the SMART log that cause events.
    #[bits(8)]
    pub smart: CriticalWarning,
    /// Enables Attached Namespace Attribute Notices.
    pub nan: bool,
    /// Enables Firmware Activation Notices.
    pub fan: bool,
    /// Enables Telemetry Log Notices.
    pub tln: bool,
    /// Enables ANA Change Notices.
    pub anacn: bool,
    /// Enables Predictable Latency Event Aggregate Log Change Notices.
    pub plealcn: bool,
    /// Enables LBA Status Information Alert Notices.
    pub lsian: bool,
    /// Enables Endurance Group Event Aggregate Log Change Notices.
    pub egealcn: bool,
    /// Enables the Normal NVM Subsystem Shutdown event.
    pub nnsshdn: bool,
    /// Enables the Temperature Threshold Hysteresis Recovery event.
    pub tthr: bool,
    /// Enables Reachability Association Notices.
    pub rassn: bool,
    /// Enables Reachability Group Notices.
    pub rgrp0: bool,
    /// Enables Allocated Namespace Attribute Notices.
    pub ansan: bool,
    #[bits(7)]
    __: u8,
    /// Enables Zone Descriptor Changed Notices.
    pub zdcn: bool,
    #[bits(3)]
    __: u8,
    /// Enables Discovery Log Page Change Notifications.
    pub dlpcn: bool,
}

/// Value of [`Fid::LBA_STATUS_INFORMATION_ATTRIBUTES`] (NVM Command Set 1.1, 4.1.3.5), in units of
/// 100 ms.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct LbaStatusAttributes {
    /// LBA Status Information Report Interval: minimum time from a read of the log page to the next
    /// alert.
    pub lsiri: u16,
    /// LBA Status Information Poll Interval: minimum time between reads of the log page by the
    /// host. The host cannot change it.
    pub lsipi: u16,
}

/// Value of [`Fid::AUTONOMOUS_POWER_STATE_TRANSITION`] (NVMe Base 2.1, 5.1.25.1.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AutonomousPowerStateTransition {
    /// Autonomous Power State Transition Enable.
    pub apste: bool,
    #[bits(31)]
    __: u32,
}

/// Value of [`Fid::HOST_MEMORY_BUFFER`] (NVMe Base 2.1, 5.1.25.2.4).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct HostMemoryBuffer {
    /// Enable Host Memory.
    pub ehm: bool,
    /// Memory Return: the host returns the same buffer as before.
    pub mr: bool,
    /// Host Memory Non-operational Access Restriction Enable.
    pub hmnare: bool,
    #[bits(29)]
    __: u32,
}

/// Value of [`Fid::KEEP_ALIVE_TIMER`] (NVMe Base 2.1, 5.1.25.1.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct KeepAliveTimer {
    /// Keep Alive Timeout in milliseconds; 0 disables the timer.
    pub kato: u32,
}

/// Value of [`Fid::HOST_THERMAL_MANAGEMENT`] (NVMe Base 2.1, 5.1.25.1.9).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct HostThermalManagement {
    /// Thermal Management Temperature 2, in kelvins.
    pub tmt2: u16,
    /// Thermal Management Temperature 1, in kelvins.
    pub tmt1: u16,
}

/// Value of [`Fid::IO_COMMAND_SET_PROFILE`] (NVMe Base 2.1, 5.1.25.1.17).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IoCommandSetProfile {
    /// I/O Command Set Combination Index: selects an entry of the data of Identify CNS 1Ch.
    #[bits(9)]
    pub iocsci: u16,
    #[bits(23)]
    __: u32,
}

/// Dword 11 of [`Fid::HOST_IDENTIFIER`] (NVMe Base 2.1, 5.1.25.1.28). The identifier itself is
/// data, 8 or 16 bytes.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct HostIdentifier {
    /// Enable Extended Host Identifier: the identifier has 16 bytes instead of 8.
    pub exhid: bool,
    #[bits(31)]
    __: u32,
}

/// Value of [`Fid::RESERVATION_NOTIFICATION_MASK`] (NVMe Base 2.1, 5.1.25.1.29), namespace
/// specific: a set bit suppresses the log page of this kind of notification.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ReservationNotificationMask {
    #[bits(1)]
    __: u8,
    /// Masks Registration Preempted notifications.
    pub regpre: bool,
    /// Masks Reservation Released notifications.
    pub resrel: bool,
    /// Masks Reservation Preempted notifications.
    pub respre: bool,
    #[bits(28)]
    __: u32,
}

/// Value of [`Fid::RESERVATION_PERSISTENCE`] (NVMe Base 2.1, 5.1.25.1.30); namespace specific.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ReservationPersistence {
    /// Persist Through Power Loss: reservations survive a loss of power.
    pub ptpl: bool,
    #[bits(31)]
    __: u32,
}

/// Value of [`Fid::NAMESPACE_WRITE_PROTECTION_CONFIG`] (NVMe Base 2.1,
/// 5.1.25.1.31); namespace specific.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct NamespaceWriteProtection {
    /// Write Protection State.
    #[bits(3)]
    pub wps: WriteProtectionState,
    #[bits(29)]
    __: u32,
}

open_values! {
    /// Write Protection State (3 bits).
    pub WriteProtectionState: u8 {
        NONE = 0, "No Write Protect";
        WRITE_PROTECT = 1, "Write Protect";
        UNTIL_POWER_CYCLE = 2, "Write Protect Until Power Cycle";
        PERMANENT = 3, "Permanent Write Protect";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_value_bits_encode() {
        assert_eq!(Arbitration::new().with_hpw_z(0xff).into_bits(), 0xff << 24);
        assert_eq!(PowerManagement::new().with_wh(7).into_bits(), 7 << 5);
        let threshold = TemperatureThreshold::from_bits(0x0011_0157);
        assert_eq!(threshold.tmpth(), 0x157);
        assert_eq!(threshold.tmpsel(), TemperatureSelect::SENSOR_1);
        assert_eq!(threshold.thsel(), ThresholdType::UNDER);
        assert_eq!(ErrorRecovery::new().with_dulbe(true).into_bits(), 1 << 16);
        let queues = NumberOfQueues::from_bits(0x0002_0003);
        assert_eq!((queues.nsq_z(), queues.ncq_z()), (3, 2));
        let coalescing = InterruptCoalescing::from_bits(0x0a07);
        assert_eq!((coalescing.thr_z(), coalescing.time()), (7, 10));
        assert!(InterruptVectorConfig::from_bits(0x1_0005).cd());
        assert_eq!(AsyncEventConfig::new().with_nan(true).into_bits(), 1 << 8);
        assert_eq!(AsyncEventConfig::new().with_fan(true).into_bits(), 1 << 9);
        assert_eq!(AsyncEventConfig::new().with_tthr(true).into_bits(), 1 << 16);
        assert_eq!(
            AsyncEventConfig::new().with_ansan(true).into_bits(),
            1 << 19
        );
        assert_eq!(
            AsyncEventConfig::new().with_dlpcn(true).into_bits(),
            1 << 31
        );
        assert_eq!(
            HostThermalManagement::new().with_tmt1(1).into_bits(),
            1 << 16
        );
    }
}
