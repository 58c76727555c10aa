-- Whose keys are whose: a hash for each role of each host, which only that host's user of that role
-- may write, so that who stands there has proved both. It may enter a key that is another's, too:
-- that takes nothing from the other, who stands at a door of its own. Beside each key stand when it
-- was shown last, in ms, and the name of its process. The key of its bulk port, which begins with
-- 'bulk:', stands there too, and beside it the other key of the same process.
local ADMITTED, REVOKED = MESH .. ':admitted', MESH .. ':revoked'
local REVOCATIONS = MESH .. ':revocations'
local UNSEEN_MS = 600000 -- who has not shown its key for so long has left without a word

local function keys_of_role(role, host) return MESH .. ':credentials:' .. role .. ':' .. host end

-- Why a key of that host does not come in; nothing when it does.
local function rejection_reason(host, public)
  if redis.call('SISMEMBER', ADMITTED, host) == 0 then
    return 'the host ' .. host .. ' is none of this mesh, or was expelled from it'
  end
  if redis.call('SISMEMBER', REVOKED, public) == 1 then
    return 'the key ' .. string.sub(public, 1, 8) .. ' was revoked'
  end
end

local function is_bulk(public) return string.sub(public, 1, 5) == 'bulk:' end

local function store_key(credential)
  local own = keys_of_role(credential.role, credential.host)
  redis.call('HSET', own, credential.public_key, NOW .. ' ' .. credential.process)
  if credential.bulk_public_key ~= '' then
    redis.call('HSET', own, credential.bulk_public_key, NOW .. ' ' .. credential.public_key)
  end
end

-- The keys of the bulk ports of the processes at a door that have this other key.
local function bulk_keys(own, public)
  local found = {}
  for key, shown in pairs(read_hash(own)) do
    if is_bulk(key) and string.match(shown, ' (.*)$') == public then found[#found + 1] = key end
  end
  return found
end

local function revocation_count() return tonumber(redis.call('GET', REVOCATIONS) or 0) end
