#![doc = include_str!("../README.md")]

pub mod clock;
mod credential;
mod error;
mod grant;
mod owner;
mod renumber;
mod resource;
mod token;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub mod fence;
pub mod lease;

pub use credential::Credential;
pub use error::{Group, Invalid};
pub use grant::Grant;
pub use owner::OwnerId;
pub use renumber::{CounterOnly, Renumber, RenumberError};
pub use resource::Resource;
pub use token::FencingToken;
