-- Credentials: one hash for each role of each host, which only that host's Redis user of that role
-- may write. A registered key therefore proves the host and the role of its process. A process may
-- register a key that another role or host has registered; this takes nothing from the other.
-- Fields are public keys, values are "<ms of the last registration> <process name>". The key of a
-- bulk port begins with 'bulk:'; its value names the public key of the same process.
local ADMITTED, REVOKED = MESH .. ':admitted', MESH .. ':revoked'
local REVOCATIONS = MESH .. ':revocations'
local UNSEEN_MS = 600000 -- a key that is not renewed for so long: its process was killed

local function keys_of_role(role, host) return MESH .. ':credentials:' .. role .. ':' .. host end

-- Returns why a key of that host is rejected; nil if it is accepted.
local function rejection_reason(host, public)
  if redis.call('SISMEMBER', ADMITTED, host) == 0 then
    return 'the host ' .. host .. ' is not a member of this mesh, or was expelled'
  end
  if redis.call('SISMEMBER', REVOKED, public) == 1 then
    return 'the key ' .. string.sub(public, 1, 8) .. ' was revoked'
  end
end

local function is_bulk(public) return string.sub(public, 1, 5) == 'bulk:' end

local function store_key(credential)
  local role_keys = keys_of_role(credential.role, credential.host)
  redis.call('HSET', role_keys, credential.public_key, NOW .. ' ' .. credential.process)
  if credential.bulk_public_key ~= '' then
    redis.call('HSET', role_keys, credential.bulk_public_key, NOW .. ' ' .. credential.public_key)
  end
end

-- Returns the bulk port keys of the process that has this public key.
local function bulk_keys(role_keys, public)
  local found = {}
  for key, value in pairs(read_hash(role_keys)) do
    if is_bulk(key) and string.match(value, ' (.*)$') == public then found[#found + 1] = key end
  end
  return found
end

local function revocation_count() return tonumber(redis.call('GET', REVOCATIONS) or 0) end
